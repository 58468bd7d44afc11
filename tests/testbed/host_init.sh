#!/bin/bash
# Makes one host of the testbed out of the namespaces it is started in, and stays as its PID 1.
#   host_init.sh FOLDER NAME ADDRESS HOME     FOLDER has keys/NAME/, authorized_keys, hosts; HOME is seen as /home,
#   or "own" for one that no other host sees. Further arguments are paths that stay visible though they lie below /tmp.
set -e
folder=$1 name=$2 address=$3 home=$4
shift 4
state=$folder/state/$name
read -r pid _ < /proc/self/stat  # the /proc of outside: the pid that others know us by
echo "$pid" > "$state.pid"
mount --make-rprivate /
mount -t tmpfs -o size=4g "tb-$name" "$state"  # an upper layer can't lie on the file system of its lower one
mkdir "$state/up" "$state/work" "$state/root"
root=$state/root
mount -t overlay -o "lowerdir=/,upperdir=$state/up,workdir=$state/work" "tb-$name" "$root"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
for path in "$@"; do
    mkdir -p -m 755 "$root$path"
    mount --rbind "$path" "$root$path"
done
mount -t tmpfs -o mode=755 run "$root/run"
if [ "$home" = own ]; then mount -t tmpfs -o mode=755 home "$root/home"; else mount --bind "$home" "$root/home"; fi
mkdir -p "$root/home/sky" && chown 2000:2000 "$root/home/sky"
chmod 711 "$root/root"  # the login user may run interpreters that lie below
hostname "$name"
echo "$name" > "$root/etc/hostname"
cp "$folder/hosts" "$root/etc/hosts"
: > "$root/etc/resolv.conf"
echo sky:x:2000:2000::/home/sky:/bin/bash >> "$root/etc/passwd"
echo sky:x:2000: >> "$root/etc/group"
echo 'sky:*:19000:0:99999:7:::' >> "$root/etc/shadow"
install -m 755 "$folder/nvidia-smi" "$root/usr/local/bin/nvidia-smi"  # of no GPUs, until it is given some
rm -f "$root"/etc/ssh/ssh_host_*
cp "$folder/keys/$name"/ssh_host_ed25519_key* "$root/etc/ssh/"
cp "$folder/authorized_keys" "$root/etc/ssh/authorized_keys"
# As distributions have it: a program that the user's shell starts, behind what that prints.
sftp=$(ls /usr/lib{,exec,64}/{openssh,ssh}/sftp-server 2>/dev/null | head -n 1)
printf '%s\n' 'Port 22' 'ListenAddress 0.0.0.0' 'HostKey /etc/ssh/ssh_host_ed25519_key' 'PasswordAuthentication no' \
    'UsePAM no' 'UseDNS no' 'AuthorizedKeysFile /etc/ssh/authorized_keys' "Subsystem sftp $sftp" \
    'MaxStartups 100:30:200' 'MaxSessions 100' > "$root/etc/ssh/sshd_config"
mkdir -p "$root/run/sshd" "$root/oldroot"
cd "$root"
pivot_root . oldroot
cd /
umount -l /oldroot
ip link set lo up
until [ -e /sys/class/net/eth0 ]; do sleep .01; done  # who waits for us has the deadline
ip addr add "$address/24" dev eth0
ip link set eth0 up
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
/usr/sbin/sshd  # is back before it listens; its pid it writes down after that
until [ -s /run/sshd.pid ]; do sleep .01; done
: > /run/ready
exec tini -s -- sleep infinity
