"""When and where in one step: the dispatcher, and the queue a request may wait in."""
