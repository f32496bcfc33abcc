"""Checkpoints on disk: saved whole, loaded strictly, and written tensor by tensor."""
