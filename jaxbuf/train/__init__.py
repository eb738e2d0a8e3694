"""Training of the embedded model: text, a byte n-gram to compare with, the language-model loop, the evaluation."""
