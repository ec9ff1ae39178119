"""From L or R to a direction."""
