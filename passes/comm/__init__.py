"""passes/comm"""
