"""Figures and tables of what the models do."""
