"""Softmax attention's memory: keys and values of the tokens so far."""
