question = 'What do the tricks of the speedruns buy?'
# The tricks of config/train_tricks.py, which are the default run's and value embeddings, and the same without one of
# them, three seeds, at equal tokens, or in equal time (not compiled: the first run would do nothing else).
#   python bench.py config/lab.py config/lab_tricks.py --dataset=my_text.txt
#   python bench.py config/lab.py config/lab_tricks.py --dataset=my_text.txt --max_minutes=0.5 --max_iters=100000 \
#       --compile=False --out_dir=out/lab_tricks_time
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
