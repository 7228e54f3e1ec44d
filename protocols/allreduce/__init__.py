"""The data phase: who brings what, and how parts are handed in, reduced and had back."""
