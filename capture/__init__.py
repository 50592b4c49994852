"""From a model to graphs: Dynamo, whole training steps, shapes, fingerprints, variants."""
