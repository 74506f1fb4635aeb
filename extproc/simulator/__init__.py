"""A model of an inference engine in virtual time, and its HTTP front."""
