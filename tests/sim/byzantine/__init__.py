"""Byzantine peers: what their honest code sends is altered on its way out."""
