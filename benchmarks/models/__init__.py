"""Models of the suite that no library has: a robot world-model policy and a small MLP."""
