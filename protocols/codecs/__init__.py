"""Codecs that are smaller than 16 bits an element, and what all codecs share. `protocols.codec` has them by name."""
