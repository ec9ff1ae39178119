"""What crosses ranks."""
