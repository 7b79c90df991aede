# How large should a batch be where time is what one has? Half a minute for each, three seeds, with the best rate of
# config/lab_batch.py. It measures time: let nothing else run beside it, and run it twice, since the first time it compiles.
#   python bench.py config/lab.py config/lab_batch_time.py --dataset=my_text.txt
what = 'compare'
out_dir = 'out/lab_batch_time'
max_minutes = 0.5
arms = '\n'.join(f'batch {b}, rate {rate}: --batch_size={b} --max_iters={10 ** 6} --lr_decay_iters={10 ** 6} --warmup_iters={warm} '
                 f'--log_interval={max(warm // 3, 1)} --learning_rate={rate}'
                 for b, rate, warm in ((8, '7.1e-03', 50), (1, '2.5e-03', 200), (32, '1.0e-02', 15), (128, '1.0e-02', 4), (512, '1.4e-02', 1)))
