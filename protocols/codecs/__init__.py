"""What travels in the place of float32: the codecs that `protocols.codec` has by name."""
