"""The text that the embedded model is trained and measured on: where it comes from, and a byte n-gram beside it."""
