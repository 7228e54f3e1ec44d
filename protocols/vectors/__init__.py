"""Flat float32 vectors: views in chunks, state roots, codecs (`codec` has them by name), robust means."""
