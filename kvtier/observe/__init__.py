"""What an operator sees: metrics and explanations."""
