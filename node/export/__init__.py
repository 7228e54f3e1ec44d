"""What a run has trained, taken out and tried."""
