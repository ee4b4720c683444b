"""The town that Terra drives in: its simulator, an image tokenizer, the training and the judge of the world model."""
