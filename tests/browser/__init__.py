"""The page in a real Chromium. `views.py` has the situations, `screenshots.py` draws them."""
