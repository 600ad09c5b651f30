"""Arithmetic of layouts: dims split over mesh axes, and what a reshard costs."""
