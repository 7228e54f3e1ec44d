"""The task `hf`: fine-tune a model of Hugging Face, whole or by adapters. Only workers import transformers."""
