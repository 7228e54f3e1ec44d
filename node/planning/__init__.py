"""What a run will be like before it starts: tokens/s, memory and traffic of each way to train a model on some peers."""
