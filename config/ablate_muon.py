# Muon for the matrices of the blocks, at the same learning rate and weight decay.
optimizer = 'muon'
