"""Attention that teaches the indexer: its backward pass has the probabilities that the indexer's loss is made of."""
