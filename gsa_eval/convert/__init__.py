"""Export models to Hugging Face's transformers and import them (the extra `hf`)."""
