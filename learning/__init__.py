"""Learners, tasks, rewards and the making of model pairs."""
