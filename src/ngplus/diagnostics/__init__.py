"""What an optimizer will do, what it costs, and what went wrong."""
