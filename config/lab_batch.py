question = 'How large should a batch be, for the same tokens?'
# Trains with batches of 1 to 512 sequences, each at rates around its best, with three seeds. config/lab_batch_time.py
# asks the same for equal time.
#   python bench.py config/lab.py config/lab_batch.py --dataset=my_text.txt
# Answer (AMD, seed 1): 8 sequences are best at equal tokens. Batches of 1, 8, 32, 128 and 512 end at 3.133, 3.057,
# 3.260, 3.782 and 4.993, each at its best rate.
what = 'compare'
out_dir = 'out/lab_batch'
picture = 'learning_rate'
variants = ''
for _batch, _rates in ((1, '1.3e-3 2.5e-3 5e-3'), (8, '3.5e-3 7.1e-3 1.4e-2'), (32, '3.5e-3 7.1e-3 1.4e-2'),
                       (128, '7.1e-3 1.4e-2 2.8e-2'), (512, '7.1e-3 1.4e-2 2.8e-2')):
    _steps = max_iters * batch_size // _batch
    _schedule = f'--max_iters={_steps} --warmup_iters={_steps // 10} --log_interval={max(_steps // 30, 1)}'
    for _rate in _rates.split():
        variants += f'batch {_batch}, rate {_rate}: --batch_size={_batch} --learning_rate={_rate} {_schedule}\n'
