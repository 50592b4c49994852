"""passes/memory"""
