"""Figures as SVG, drawn by matplotlib."""
