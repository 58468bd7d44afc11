"""Packages and files that ranks get beside what their interpreter has."""
