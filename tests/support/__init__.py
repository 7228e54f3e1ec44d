"""What tests share: clusters, fixtures and checkers. `checkers.py` judges the histories of simulated and real runs."""
