"""Export of a run's trained model, and text generation with it."""
