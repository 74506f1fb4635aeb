"""What clients speak: request bodies in, prompt pieces out; model splice; error bodies in the client's
dialect.
"""
