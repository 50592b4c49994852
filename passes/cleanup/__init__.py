"""passes/cleanup"""
