"""One adapter an engine: its metric names, health path and connection habits. Add a file and a line in
``registry``.
"""
