"""fusewright/costs"""
