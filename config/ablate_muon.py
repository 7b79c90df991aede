# Muon for the matrices in the blocks, as published. AdamW updates the other weights, and both have the same learning
# rate and weight decay.
optimizer = 'muon'
adamw_scale = embed_scale = 1.0
