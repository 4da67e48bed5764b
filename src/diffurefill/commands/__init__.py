"""The commands, one class each, which import what they need only when run."""
