question = 'What do the tricks of the speedruns buy?'
# Adds value embeddings and the default run's optimizer, rates and decay to config/lab.py, and removes one of them at a
# time, with three seeds, at equal tokens or in equal time (not compiled).
#   python bench.py config/lab.py config/lab_tricks.py --dataset=my_text.txt
#   python bench.py config/lab.py config/lab_tricks.py --dataset=my_text.txt --max_minutes=0.5 --max_iters=100000 \
#       --compile=False --out_dir=out/lab_tricks_time
# Answer: all tricks together end at 2.745. No value embeddings: +0.090, tied weights +0.070, one rate for all weights
# +0.197, AdamW instead of Muon, also with one rate, +0.293, no plateau +0.079. At 30 s each, on two cores of an AMD
# EPYC with AVX2, all end at 3.334, and in the same order: +0.039, +0.059, +0.183, +0.116 and +0.103, with standard
# deviations of 0.014 to 0.067 over seeds.
what = 'compare'
out_dir = 'out/lab_tricks'
value_embeds = True
optimizer = 'muon'
adamw_scale = 4.0
embed_scale = 20.0
learning_rate = 6e-3
min_lr = -1.0
lr_decay = 'linear'
variants = '''
all of them:
without value embeddings: --value_embeds=False
tied weights: --tie_weights=True
one rate for all weights: --adamw_scale=1 --embed_scale=1
AdamW instead of Muon: --optimizer=adamw
no plateau, a cosine to 0: --lr_decay=cosine --min_lr=0
'''
