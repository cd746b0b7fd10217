"""A self-contained web page of what the callbacks of a run have measured."""
