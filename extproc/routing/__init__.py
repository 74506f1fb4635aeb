"""Who is asking, for what, and which pool answers: Tenant, Route, Pool, Rejection; matching a request to them."""
