"""The text encoder service: prompts to embeddings."""
