"""How much memory serving takes: what a request costs in each form, and how many fit."""
