# Muon for the matrices in the blocks, which all move at every step, as published. AdamW still moves the other weights,
# and both have the same learning rate and weight decay.
optimizer = 'muon'
muon_every = 1
adamw_scale = embed_scale = 1.0
