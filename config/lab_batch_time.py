question = 'How large should a batch be, for the same time?'
# Trains each variant for half a minute, with three seeds, at rates near the best of config/lab_batch.py. Run nothing
# else at the same time, because it measures time. Compiling does not count.
#   python bench.py config/lab.py config/lab_batch_time.py --dataset=my_text.txt
# Answer (compiled, two cores of an AMD EPYC with AVX2): 8 sequences are best at 30 s each, too. Batches of 1, 8, 32,
# 128 and 512 end at 3.650, 3.357, 3.567, 4.112 and 5.302, with standard deviations of 0.02 to 0.21 over seeds.
what = 'compare'
out_dir = 'out/lab_batch_time'
max_minutes = 0.5
max_iters = 1_000_000
variants = '''
batch 8: --batch_size=8 --learning_rate=7.1e-3 --warmup_iters=50 --log_interval=16
batch 1: --batch_size=1 --learning_rate=2.5e-3 --warmup_iters=200 --log_interval=66
batch 32: --batch_size=32 --learning_rate=1e-2 --warmup_iters=15 --log_interval=5
batch 128: --batch_size=128 --learning_rate=1e-2 --warmup_iters=4 --log_interval=1
batch 512: --batch_size=512 --learning_rate=1.4e-2 --warmup_iters=1 --log_interval=1
'''
