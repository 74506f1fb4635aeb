"""Everything with a socket, a file or a clock. It pumps events into the core and holds no rules."""
