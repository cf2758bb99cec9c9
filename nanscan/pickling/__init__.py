"""What pickling an object would do: every place that can't be saved, loaded or kept, and why."""
