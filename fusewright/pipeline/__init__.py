"""fusewright/pipeline"""
