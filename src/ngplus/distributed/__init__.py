"""Communication between ranks, and which rank owns which matrix."""
