"""The simulator on processors that workers share: what CPU workers of one machine take from each other."""
