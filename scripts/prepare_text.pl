#!/usr/bin/env perl
# prepare_text.pl [OUTPUT_DIR]   (default: data/quickstart)
#
# Makes train.txt and valid.txt from English prose that the distribution ships: the paragraphs of
# perl-doc's manual pages and the longer entries of fortunes. Markup is resolved, code and headings are
# left out, lines are joined, only ASCII is kept. A document is a manual page or a fortune; documents
# are shuffled with a fixed seed before 5 % of the bytes are held out. Paragraphs that appear in
# several pages are kept once, so that nothing held out was trained on.
#
# Documents are separated by a line that holds a form feed. Same packages, same bytes.
use strict;
use warnings;

my $HELD_OUT = 0.05;
my $SEED     = 20240607;
my @SECTIONS = qw(art computers cookie debian definitions education fortunes humorists kids law linux
  literature miscellaneous news people perl platitudes politics science wisdom work);

my $out = shift // 'data/quickstart';
if ($out =~ /^-/ or @ARGV) { die "usage: prepare_text.pl [OUTPUT_DIR]\n"; }

# ---- what the packages hold ------------------------------------------------------------------------

sub manual_pages {
  my @files = grep { /\.pod$/ } split /\n/, `dpkg -L perl-doc 2>/dev/null`;
  @files = glob('/usr/share/perl/*/pod/*.pod') unless @files;
  # perltoc is a table of contents of all others.
  return sort grep { -f && !m{/perltoc\.pod$} } @files;
}

sub slurp {
  my ($path) = @_;
  open my $in, '<:raw', $path or die "$path: $!\n";
  local $/;
  return scalar <$in>;
}

# ---- POD to plain text -----------------------------------------------------------------------------

my %ENTITY = (lt => '<', gt => '>', verbar => '|', sol => '/', quot => '"', amp => '&', nbsp => ' ');

# The text from pos() on, up to the closing bracket $close (a pattern), or to the end.
sub resolve {
  my ($text, $close) = @_;
  my $result = '';
  while (1) {
    if (defined $close and $$text =~ /\G$close/gc) { return $result; }
    if ($$text =~ /\G([A-Z])(<<+)\s+/gc) {
      my ($code, $n) = ($1, length $2);
      $result .= render($code, resolve($text, "\\s+>{$n}"));
    } elsif ($$text =~ /\G([A-Z])</gc) {
      my $code = $1;
      $result .= render($code, resolve($text, '>'));
    } elsif ($$text =~ /\G(.)/gcs) {
      $result .= $1;
    } else {
      return $result;
    }
  }
}

sub render {
  my ($code, $inner) = @_;
  return '' if $code eq 'X' or $code eq 'Z';
  if ($code eq 'E') {
    return $ENTITY{$inner} // ($inner =~ /^[0-9]+$/ && $inner >= 32 && $inner < 127 ? chr $inner : "\x80");
  }
  if ($code eq 'L') {
    return $1 if $inner =~ /^(.*?)\|/s;
    return $inner if $inner =~ m{^[a-z]+://};
    my ($page, $section) = split m{/}, $inner, 2;
    return $page unless defined $section and length $section;
    $section =~ s/^"(.*)"$/$1/s;
    return length $page ? "\"$section\" in $page" : "\"$section\"";
  }
  return $inner;
}

sub plain {
  my ($text) = @_;
  for ($text) {
    s/\xE2\x80[\x98\x99]/'/g;
    s/\xE2\x80[\x9C\x9D]/"/g;
    s/\xE2\x80[\x93\x94]/--/g;
    s/\xC2\xA0/ /g;
    s/\s+/ /g;
    s/^ | $//g;
  }
  return $text;
}

# Sentences, not lists, tables, names or addresses.
sub is_prose {
  my ($p) = @_;
  return 0 if $p =~ /[^\x20-\x7E]/;
  return 0 if length $p < 80 or $p !~ /[.!?:;"')]$/;
  my $letters = () = $p =~ /[A-Za-z ,.']/g;
  return 0 if $letters < 0.93 * length $p;
  my @words = $p =~ /(?<![^\s("'])[A-Za-z][a-z']*(?![^\s)"'.,;:!?-])/g;
  return @words >= 12 && @words >= 0.75 * (() = $p =~ /\S+/g);
}

sub paragraphs_of_pod {
  my ($pod) = @_;
  my ($active, $skipping, @result) = (0, 0);
  for my $block (split /\n[ \t]*\n+/, $pod =~ s/\r\n?/\n/gr) {
    $block =~ s/^\n+//;
    if ($block =~ /^=([a-z]+)/) {
      $active   = $1 ne 'cut';
      $skipping = 1 if $1 eq 'begin';
      $skipping = 0 if $1 eq 'end';
      next;
    }
    next if !$active or $skipping or $block =~ /^[ \t]/m or $block !~ /\S/;
    pos($block) = 0;
    push @result, plain(resolve(\$block, undef));
  }
  return @result;
}

# ---- documents -------------------------------------------------------------------------------------

my %seen;

# Pages of different versions repeat paragraphs with other numbers in them.
sub is_new {
  my ($p) = @_;
  my $key = lc $p =~ s/[^A-Za-z]+//gr;
  return !$seen{$key}++;
}

my @documents;
my @pages = manual_pages();
die "no manual pages found: install the package perl-doc (scripts/install_packages.sh)\n" unless @pages;
for my $page (@pages) {
  my @kept = grep { is_prose($_) && is_new($_) } paragraphs_of_pod(slurp($page));
  push @documents, join("\n\n", @kept) . "\n" if @kept >= 3;
}
my $num_pages = @documents;
for my $section (@SECTIONS) {
  my $file = "/usr/share/games/fortunes/$section";
  next unless -f $file;
  for my $fortune (split /^%\n/m, slurp($file)) {
    $fortune =~ s/^\s*--.*//ms;    # the author
    next if $fortune =~ /^\s+\S/m; # verse, dialogue, drawings
    my $text = plain($fortune);
    push @documents, "$text\n" if is_prose($text) and is_new($text);
  }
}
my $num_fortunes = @documents - $num_pages;

# Fisher-Yates with a generator of our own: perl's may differ between versions.
my $state = $SEED;
for (my $i = $#documents; $i > 0; --$i) {
  $state = ($state * 1103515245 + 12345) & 0x7fffffff;
  my $j = int($state / 0x80000000 * ($i + 1));
  @documents[$i, $j] = @documents[$j, $i];
}

my $total = 0;
$total += length for @documents;
my (@valid, @train);
my $held = 0;
for my $d (@documents) {
  # The last page taken may not make the held-out part much larger than asked for.
  if ($held + length($d) <= 1.1 * $HELD_OUT * $total and $held < $HELD_OUT * $total) {
    push @valid, $d;
    $held += length $d;
  } else {
    push @train, $d;
  }
}

# ---- output ----------------------------------------------------------------------------------------

my $made = '';
for my $part (split m{/}, $out) {
  $made .= "$part/";
  mkdir $made unless -d $made;
}
print "English prose from $num_pages manual pages and $num_fortunes fortunes:\n";
for ([ 'train.txt', \@train ], [ 'valid.txt', \@valid ]) {
  my ($name, $documents) = @$_;
  my $text = join "\f\n", @$documents;
  open my $file, '>:raw', "$out/$name.new" or die "$out/$name.new: $!\n";
  print {$file} $text;
  close $file or die "$out/$name.new: $!\n";
  rename "$out/$name.new", "$out/$name" or die "$out/$name: $!\n";
  printf "  %-32s %9d bytes  %5d documents\n", "$out/$name", length $text, scalar @$documents;
}
